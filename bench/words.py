"""Words of one token each in BERT vocabularies: a text of n words has n tokens and the special ones."""

_TEXT = """
search index query vector model worker stream river mountain engine paper market signal winter garden music history
physics language protein election planet museum bridge contract
"""
WORDS = tuple(_TEXT.split())
