"""connector *hands over*: the policy of KV movement, scheduler side and worker side."""
