"""The coordinator: an asyncio shell around the job's state machine."""
