"""Planned modules: an `nn.Module` whose forward and backward follow a rematerialisation plan."""
