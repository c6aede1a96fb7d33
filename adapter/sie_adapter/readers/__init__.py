"""Families that generate text from images and sounds, by greedy decoding of several texts at the same time."""
