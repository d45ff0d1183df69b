"""Metrics of a running job where people keep them: Prometheus, TensorBoard, MLflow and Weights & Biases."""
