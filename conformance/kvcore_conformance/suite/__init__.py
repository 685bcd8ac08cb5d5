"""The tests of the contract, a file a group. ``from kvcore_conformance.suite import *`` gives a test file all of them, and the fixtures."""
