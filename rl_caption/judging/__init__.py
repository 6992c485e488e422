"""How well metrics agree with the truth of the generated world."""
