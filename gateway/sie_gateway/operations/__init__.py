"""Routes of operators: status and health, models, pools, configurations, cached answers, dead letters, history, doctor
checks, and the scopes of a credential.
"""
