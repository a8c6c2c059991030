"""How to choose: lower sets, strategies, the one lowering and the one simulator. Knows no torch."""
