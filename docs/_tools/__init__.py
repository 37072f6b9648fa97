"""What makes pages out of tutorials, results and source files; used by mkdocs through `hook` and on its own."""
