"""Reports for the user: tables and pictures of plans, their memory and their overhead."""
