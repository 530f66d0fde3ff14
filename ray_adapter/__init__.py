"""Ray jobs on keyshard: reserved, nothing is here yet."""
