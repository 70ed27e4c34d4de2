{{- define "outrider.name" -}}
{{- $name := default .Release.Name .Values.nameOverride -}}
{{- if gt (len $name) 40 }}{{ fail (printf "the name %s has more than 40 characters, and KubeRay adds to it" $name) }}{{ end -}}
{{- $name -}}
{{- end }}

{{- define "outrider.selector" -}}
app.kubernetes.io/name: outrider
app.kubernetes.io/instance: {{ include "outrider.name" . }}
{{- end }}

{{- define "outrider.labels" -}}
{{ include "outrider.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "outrider.image" -}}
{{- $tag := default .Chart.AppVersion .Values.image.tag -}}
{{- .Values.image.repository }}{{ if hasPrefix "sha256:" $tag }}@{{ else }}:{{ end }}{{ $tag -}}
{{- end }}

{{/* What KubeRay runs on the cluster: Serve's declarative configuration. The file of `outrider serve` is one in the gateway's pods. */}}
{{- define "outrider.serveConfig" -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: 8000
logging_config:
  encoding: JSON
  log_level: WARNING
  enable_access_log: false
applications:
  - name: outrider
    import_path: deploy.ray_service:app
    route_prefix: /
    args:
      config_file: /etc/outrider/config.yaml
    deployments:
      - name: cluster
        num_replicas: 1
        ray_actor_options:
          num_cpus: 0.1
          label_selector:
            outrider/pool: gateway
      - name: api
        {{- if not (default dict .Values.modelSpec.config.api).max_replicas }}
        num_replicas: {{ (default dict .Values.modelSpec.config.api).replicas | default 1 }}
        {{- end }}
        ray_actor_options:
          num_cpus: 0.2
          label_selector:
            outrider/pool: gateway
{{- end }}

{{/* A probe of Ray's agent: raylet, and on the head GCS as well. Arguments: path, port, periodSeconds, failureThreshold. */}}
{{- define "outrider.probe" -}}
httpGet:
  path: {{ .path }}
  port: {{ .port }}
timeoutSeconds: 5
periodSeconds: {{ .periodSeconds }}
failureThreshold: {{ .failureThreshold }}
{{- end }}

{{/* Environment of every Ray container: Serve's proxy is HAProxy with Outrider's configuration (deploy/haproxy.py). */}}
{{- define "outrider.env" -}}
- {name: HOME, value: /home/outrider}
- {name: OUTRIDER_HOME, value: /home/outrider/cache}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_worker_niceness, value: "0"}
- {name: RAY_SERVE_ENABLE_HA_PROXY, value: "1"}
- {name: RAY_SERVE_HAPROXY_BINARY_PATH, value: /opt/outrider/bin/haproxy}
- {name: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, value: "deploy.serve_process:prepare"}
- {name: RAY_SERVE_HAPROXY_NBTHREAD, value: "1"}
- {name: RAY_SERVE_HAPROXY_METRICS_ENABLED, value: "0"}
- {name: RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S, value: "86400"}
- {name: RAY_SERVE_HAPROXY_MAXCONN, value: "20100"}
- {name: RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD, value: "0"}
- {name: RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP, value: "0"}
- {name: RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S, value: "60"}
- {name: RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S, value: "2"}
- {name: RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S, value: "120"}
{{- end }}

{{/* A pod template. Arguments: root, group, role (head, worker), serving (whether clients reach it). */}}
{{- define "outrider.podTemplate" -}}
{{- $v := .root.Values -}}
{{- $group := .group -}}
metadata:
  labels:
    {{- include "outrider.selector" .root | nindent 4 }}
    outrider/role: {{ .name }}
    {{- with merge dict (default dict $group.podLabels) $v.common.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- if or .serving $group.annotations }}
  annotations:
    {{- if .serving }}
    # The file of `outrider serve`, which the volume `config` shows where Serve builds the application, on the nodes that all of
    # its deployments select. Being part of the pod, its change is a new cluster.
    outrider/config: {{ toYaml $v.modelSpec.config | quote }}
    {{- end }}
    {{- with $group.annotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
spec:
  serviceAccountName: {{ include "outrider.name" .root }}-{{ .role }}
  # Of the head only: the autoscaler beside it asks the API server for pods.
  automountServiceAccountToken: {{ and (eq .role "head") $v.autoscaling.enabled }}
  {{- if $v.autoscaling.enabled }}
  restartPolicy: Never # what autoscaler v2 requires; KubeRay replaces the pod
  {{- end }}
  terminationGracePeriodSeconds: {{ default 30 $group.terminationGracePeriodSeconds }}
  {{- with $v.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" }}
  {{- with index $group $key }}
  {{ $key }}:
    {{- if kindIs "string" . }} {{ . }}{{ else }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- end }}
  {{- end }}
  securityContext:
    {{- toYaml (default $v.podSecurityContext $group.podSecurityContext) | nindent 4 }}
  initContainers:
    # The kernels that the image compiled, into the writable cache. A node with another CPU compiles its own at the start.
    - name: cache
      image: {{ include "outrider.image" .root | quote }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      command: [cp, --recursive, --no-target-directory, --preserve=mode, /opt/outrider/cache, /home/outrider/cache]
      securityContext:
        {{- toYaml (default $v.securityContext $group.securityContext) | nindent 8 }}
      resources:
        requests: {cpu: 100m, memory: 64Mi}
        limits: {cpu: "1", memory: 256Mi}
      volumeMounts:
        - {name: scratch, mountPath: /home/outrider, subPath: home}
    {{- with $group.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  containers:
    - name: ray-{{ .role }}
      image: {{ include "outrider.image" .root | quote }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      securityContext:
        {{- toYaml (default $v.securityContext $group.securityContext) | nindent 8 }}
      ports:
        {{- if eq .role "head" }}
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        {{- end }}
        {{- if or (eq .role "head") .serving }}
        - {name: serve, containerPort: 8000}
        {{- end }}
        - {name: metrics, containerPort: 8080}
      env:
        {{- include "outrider.env" .root | nindent 8 }}
        {{- range concat $v.common.containerEnv (default list $group.containerEnv) }}
        - {{ toJson . }}
        {{- end }}
      {{- with $group.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      resources:
        {{- toYaml $group.resources | nindent 8 }}
      startupProbe:
        {{- include "outrider.probe" (dict "path" "/api/healthz" "port" 52365 "periodSeconds" 5 "failureThreshold" 60) | nindent 8 }}
      # Not of HAProxy: its wrapper and Serve replace it, and while it is away the readiness probe takes the pod out of service.
      livenessProbe:
        {{- include "outrider.probe" (dict "path" "/api/healthz" "port" 52365 "periodSeconds" 10 "failureThreshold" 12) | nindent 8 }}
      readinessProbe:
        {{- if .serving }}
        # The proxy and a replica of the API behind it. It answers while no target is ready: /health does not.
        {{- include "outrider.probe" (dict "path" "/version" "port" "serve" "periodSeconds" 5 "failureThreshold" 2) | nindent 8 }}
        {{- else if and (eq .role "worker") (eq $v.upgradeStrategy.type "NewClusterWithIncrementalUpgrade") }}
        # An incremental upgrade routes clients to every ready worker at the port number 8000, at which nothing listens here.
        tcpSocket: {port: 8000}
        periodSeconds: 10
        {{- else }}
        {{- include "outrider.probe" (dict "path" "/api/healthz" "port" 52365 "periodSeconds" 5 "failureThreshold" 3) | nindent 8 }}
        {{- end }}
      volumeMounts:
        {{- if .serving }}
        - {name: config, mountPath: /etc/outrider, readOnly: true}
        {{- end }}
        - {name: scratch, mountPath: /tmp, subPath: tmp}
        - {name: scratch, mountPath: /home/outrider, subPath: home}
        {{- if include "outrider.hasSecrets" .root }}
        - {name: secrets, mountPath: /etc/outrider-secrets, readOnly: true}
        {{- end }}
        {{- if $v.modelSpec.volume.claimName }}
        - {name: models, mountPath: {{ $v.modelSpec.volume.mountPath }}, readOnly: true}
        {{- end }}
        {{- with $group.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with $group.sidecarContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- if .serving }}
    - name: config
      downwardAPI:
        items:
          - path: config.yaml
            fieldRef: {fieldPath: "metadata.annotations['outrider/config']"}
    {{- end }}
    - name: scratch
      emptyDir: {sizeLimit: {{ $v.scratchSize }}}
    {{- if include "outrider.hasSecrets" .root }}
    - name: secrets
      projected:
        defaultMode: 0440
        sources:
          {{- range $file, $secret := dict "api-keys" $v.secrets.apiKeys "operator-keys" $v.secrets.operatorKeys "redis-password" $v.secrets.redisPassword "link-token" $v.secrets.linkToken }}
          {{- if $secret.name }}
          - secret:
              name: {{ $secret.name }}
              items: [{key: {{ $secret.key }}, path: {{ $file }}}]
          {{- end }}
          {{- end }}
          {{- with $v.secrets.tls.name }}
          - secret:
              name: {{ . }}
              items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}, {key: ca.crt, path: ca.crt}]
          {{- end }}
    {{- end }}
    {{- with $v.modelSpec.volume.claimName }}
    - name: models
      persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
    {{- end }}
    {{- with $group.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- define "outrider.hasSecrets" -}}
{{- range $secret := list .Values.secrets.apiKeys .Values.secrets.operatorKeys .Values.secrets.redisPassword .Values.secrets.linkToken .Values.secrets.tls }}{{ if $secret.name }}yes{{ end }}{{ end }}
{{- end }}

{{/* The worker groups as one mapping under `groups`: that of the targets, and all others that are not disabled. */}}
{{- define "outrider.groups" -}}
groups:
  - {{ toJson .Values.worker }}
  {{- range $name, $group := .Values.additionalWorkerGroups }}
  {{- if not $group.disabled }}
  - {{ toJson (merge (dict "groupName" $name) $group) }}
  {{- end }}
  {{- end }}
{{- end }}
