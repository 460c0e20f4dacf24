"""How the promises are broken on purpose, and judged from outside."""
