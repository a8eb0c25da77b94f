"""What the engine tells about itself: statistics, their loggers, Prometheus, spans. No global registry, no handlers."""
