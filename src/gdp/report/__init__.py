"""What is told about plans: tables for a terminal, JSON documents, what limits a step."""
