"""How well metrics agree with people, and with the truth of the generated world."""
