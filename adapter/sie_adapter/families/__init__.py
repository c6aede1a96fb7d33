"""Model families, and code that they share. `sie_contracts.models.families` names the class of each family.

The class of a family loads a model from its folder, offline. The class raises ModelLoadFailed, for example INCOMPATIBLE
for weights, limits or files that do not fit the entry, and ImportError if the family needs a package that is missing.

The static method `fault_of_files` of the class returns the reason why a load would refuse the folder, or an empty
string. The method runs no code of the folder. It raises ModelLoadFailed if names or shapes of the stored tensors do not
fit the model class. Most families read no weights for this check.
"""
