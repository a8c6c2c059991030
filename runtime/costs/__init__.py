"""Time and memory of single ops: measured, or modelled for another device."""
