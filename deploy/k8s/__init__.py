"""`outrider k8s`: values for the Helm chart in `k8s/chart`, and the chart's Grafana dashboard."""
