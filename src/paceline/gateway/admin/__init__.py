"""The routes of operators: the dashboard, drafts, the planner."""
