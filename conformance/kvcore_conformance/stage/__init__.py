"""What runs in the process of the tests: child processes and how they are driven, the memory's oracle, and the scenes that tests share."""
