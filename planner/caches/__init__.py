"""What planning keeps: values computed once per graph, compiled loops, plans on disk."""
