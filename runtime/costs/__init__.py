"""The time and memory of single ops: measured on this machine, or modelled for another device."""
