"""Workers as local processes: supervisor, pools, rollout."""
