"""Steps with open sizes: their sizes are expressions of the batch's sizes, and a guard says for which they
hold."""
