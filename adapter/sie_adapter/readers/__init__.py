"""Families that write text from images and sounds, by greedy decoding in slots."""
