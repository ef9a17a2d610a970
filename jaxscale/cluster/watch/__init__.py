"""Watch of a run: heartbeats, fault reports and a common stop."""
