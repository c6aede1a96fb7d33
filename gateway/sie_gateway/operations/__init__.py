"""Routes of operators: status and health, models (also in the form of Ollama), pools, configurations, cached answers,
dead letters, history, doctor checks, and the scopes of a credential.
"""
