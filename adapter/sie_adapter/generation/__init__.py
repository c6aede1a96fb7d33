"""Loop of the models that generate text: rows in slots of a decoder, one token for each row in each step."""
