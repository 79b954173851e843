"""Shows plans: tables for a terminal, JSON documents, pages, traces, figures, and progress while gdp works."""
