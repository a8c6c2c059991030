"""Caches of the planner: values computed once per problem, compiled machine code, and plans in memory and on disk."""
