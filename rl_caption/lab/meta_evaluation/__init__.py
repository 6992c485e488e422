"""Agreement of metrics with people, and with the truth of the generated world."""
