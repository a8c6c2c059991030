"""Integer programs over stages and steps, and the solver behind them."""
