"""Rewards: functions, answers, calls, time limits and URLs."""
