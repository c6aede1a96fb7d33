"""Families that extract entities, relations, classes and decisions by names that a request gives: GLiNER, GLiNER2,
GLiClass, GLiREL and Laya.
"""
