"""Long proofs and measurements that are run by hand."""
