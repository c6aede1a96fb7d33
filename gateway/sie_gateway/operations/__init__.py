"""Routes of operators: status and health, models, pools, configurations, dead letters, and scopes of a credential."""
