"""golden_files: the cases of each tests/golden/*.json, one module a file (or a family of files)."""
