"""A draft worker: schedules, drafts ahead, answers targets."""
