"""Model families, one in each file. `sie_contracts.models.families` has a row for each family with the name of its
class.
"""
