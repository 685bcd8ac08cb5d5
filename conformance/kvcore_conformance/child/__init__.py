"""What runs in the processes of the managers: the worker that takes commands, and what it can be asked to do beside."""
