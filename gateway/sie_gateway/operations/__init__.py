"""Routes of operators: status and health, models, pools, configurations, dead letters, history and doctor checks."""
