"""The arguments of a command for a network of the zoo."""


def zoo_arguments(name: str, **sizes: int) -> tuple[str, ...]:
    """A network's name, its sizes, and modelled costs."""
    return (name, *(f"--dim={size}={number}" for size, number in sizes.items()), "--costs", "roofline")
