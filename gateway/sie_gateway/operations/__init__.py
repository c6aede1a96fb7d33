"""Routes of operators: status and health, models, pools, configurations, dead letters, history and the doctor's checks."""
