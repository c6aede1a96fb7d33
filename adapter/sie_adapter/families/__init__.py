"""Model families, one in each file. `sie_contracts.models.families` names the class of each family."""
