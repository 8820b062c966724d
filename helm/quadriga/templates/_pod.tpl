{{/* Pods of the Ray cluster. Nothing here may depend on the chart's version: KubeRay would start a
second cluster for it. Probes are KubeRay's own. */}}

{{/* Environment as name → value or valueFrom. Sorted, so that it never changes by itself. */}}
{{- define "quadriga.ownEnv" -}}
HOME: /home/quadriga
HF_HOME: /home/quadriga/hf
TOKENIZERS_PARALLELISM: "false"
RAY_USAGE_STATS_ENABLED: "0"
RAY_worker_niceness: "0"
RAY_SERVE_SESSION_ID_HEADER_KEY: idempotency-key
RAY_SERVE_HAPROXY_BALANCE_ALGORITHM: hdr(idempotency-key)
RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD: "0"
RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP: "0"
RAY_SERVE_GRPC_MAX_MESSAGE_SIZE: "67108864"
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH: serve_app.http.header_limits.guard
RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S: "60"
RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S: "2"
{{- /* KubeRay moves the traffic once the ingresses have started. */}}
QUADRIGA_READY_WITHIN_S: "600"
RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT: "20"
QUADRIGA_LOG_FORMAT: {{ dig "logging" "format" "text" .Values.config }}
{{- /* Where a node has no longer left than `graceful_shutdown_timeout_s`, Serve stops its ingress at once. */}}
RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S: {{ add .Values.drainSeconds 60 | quote }}
RAY_task_events_report_interval_ms: "0"
RAY_enable_timeline: "0"
{{- /* Else what processes say is kept whole, until `scratchSize` is full and the pod evicted. */}}
RAY_ROTATION_MAX_BYTES: "67108864"
RAY_ROTATION_BACKUP_COUNT: "4"
{{- if .Values.haproxy.enabled }}
RAY_SERVE_ENABLE_HA_PROXY: "1"
RAY_SERVE_HAPROXY_BINARY_PATH: /home/quadriga/haproxy
{{- /* What streams may last on after a reload, as when ingresses are exchanged. */}}
RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S: {{ int .Values.drainSeconds | quote }}
{{- /* As `buffer_bytes` in serve_app/http/haproxy.py. */}}
{{- $headers := mul 12 (max 0 (sub (dig "ingress" "max_headers" 100 .Values.config) 100)) }}
{{- $buffer := add 4096 $headers (dig "ingress" "max_header_bytes" 12288 .Values.config) }}
{{- if gt $buffer 16384 }}
RAY_SERVE_HAPROXY_TUNE_BUFSIZE: {{ $buffer | quote }}
{{- end }}
{{- end }}
{{- with .Values.tls.secretName }}
QUADRIGA_TLS_CERT: /etc/quadriga/tls/tls.crt
QUADRIGA_TLS_KEY: /etc/quadriga/tls/tls.key
{{- if $.Values.tls.clientCaSecret }}
QUADRIGA_TLS_CLIENT_CA: /etc/quadriga/client-ca/ca.crt
{{- end }}
QUADRIGA_HTTPS_PORT: {{ $.Values.tls.httpsPort | quote }}
QUADRIGA_GRPC_TLS_PORT: {{ $.Values.tls.grpcPort | quote }}
QUADRIGA_HTTP_PORT: {{ $.Values.http.port | quote }}
QUADRIGA_GRPC_PORT: {{ $.Values.grpc.port | quote }}
{{- end }}
{{- with .Values.network.interface }}
GLOO_SOCKET_IFNAME: {{ . | quote }}
NCCL_SOCKET_IFNAME: {{ . | quote }}
{{- end }}
{{- if .Values.otel.enabled }}
OTEL_EXPORTER_OTLP_ENDPOINT: {{ .Values.otel.endpoint | quote }}
OTEL_SERVICE_NAME: {{ include "quadriga.fullname" . | quote }}
OTEL_TRACES_SAMPLER: parentbased_traceidratio
OTEL_TRACES_SAMPLER_ARG: {{ .Values.otel.sampleRatio | quote }}
{{- with .Values.otel.headersSecret }}
OTEL_EXPORTER_OTLP_HEADERS:
  secretKeyRef: {name: {{ quote . }}, key: headers}
{{- end }}
{{- end }}
{{- with .Values.huggingFace.existingSecret }}
HF_TOKEN:
  secretKeyRef: {name: {{ quote . }}, key: {{ quote $.Values.huggingFace.key }}}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "own" <list of the pod's variables>): these win, then the user's of all pods;
KubeRay takes no name twice. */}}
{{- define "quadriga.env" -}}
{{- $given := .own -}}
{{- $names := dict -}}
{{- range .own }}{{- $_ := set $names .name true }}{{- end -}}
{{- range reverse .root.Values.env -}}
{{- if not (hasKey $names .name) }}{{- $given = prepend $given . }}{{- end -}}
{{- $_ := set $names .name true -}}
{{- end -}}
{{- $env := list -}}
{{- range $name, $value := include "quadriga.ownEnv" .root | fromYaml -}}
{{- if not (hasKey $names $name) -}}
{{- $env = append $env (dict "name" $name (ternary "valueFrom" "value" (kindIs "map" $value)) $value) -}}
{{- end -}}
{{- end -}}
{{- concat $env $given | toYaml -}}
{{- end -}}

{{- define "quadriga.sharedMounts" -}}
- {name: scratch, mountPath: /tmp, subPath: tmp}
- {name: scratch, mountPath: /home/quadriga, subPath: home}
- {name: shm, mountPath: /dev/shm}
{{- with .Values.apiKeys.existingSecret }}
- {name: api-keys, mountPath: {{ include "quadriga.keysPath" $ }}, readOnly: true}
{{- end }}
{{- if .Values.tls.secretName }}
- {name: tls, mountPath: /etc/quadriga/tls, readOnly: true}
{{- end }}
{{- if .Values.tls.clientCaSecret }}
- {name: client-ca, mountPath: /etc/quadriga/client-ca, readOnly: true}
{{- end }}
{{- if .Values.modelStorage.enabled }}
- {name: models, mountPath: {{ quote .Values.modelStorage.mountPath }}, readOnly: true}
{{- end }}
{{- end -}}

{{/* What starts HAProxy is written where it runs, as it depends on the certificates. */}}
{{- define "quadriga.haproxyStarter" -}}
- name: haproxy-starter
  image: {{ include "quadriga.image" .root | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [sh, -ec]
  args:
    - |
      starter=$(python -m serve_app.http.haproxy{{ if and .root.Values.tls.secretName (not .root.Values.grpc.enabled) }} --no-grpc{{ end }})
      ln -sf "$starter" /home/quadriga/haproxy
  env:
    {{- include "quadriga.env" (dict "root" .root "own" .pod.env) | nindent 4 }}
  resources:
    requests: {cpu: 100m, memory: 128Mi}
    limits: {cpu: "1", memory: 512Mi}
  securityContext:
    {{- toYaml .pod.securityContext | nindent 4 }}
  volumeMounts:
    {{- include "quadriga.sharedMounts" .root | nindent 4 }}
{{- end -}}

{{/* (dict "root" $ "pod" <settings> "group" <name> "labels" <Ray labels> "container" <name>) */}}
{{- define "quadriga.podTemplate" -}}
{{- $root := .root -}}
{{- $pod := .pod -}}
{{- $selector := merge (dict "quadriga/group" .group) (include "quadriga.selector" $root | fromYaml) -}}
metadata:
  labels:
    {{- merge (dict) $selector .labels $pod.podLabels | toYaml | nindent 4 }}
  {{- /* KubeRay compares pods without their tolerations. */}}
  {{- $tolerations := empty $pod.tolerations | ternary (dict) (dict "quadriga/tolerations" (toJson $pod.tolerations | sha256sum | trunc 8)) }}
  {{- with merge (dict) $tolerations $pod.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "quadriga.serviceAccountName" $root | quote }}
  automountServiceAccountToken: {{ and (eq .group "head") $root.Values.autoscaling.enabled }}
  terminationGracePeriodSeconds: {{ add $root.Values.drainSeconds 70 }}
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- range $field := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" }}
  {{- with get $pod $field }}
  {{ $field }}: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- with $pod.podSpec }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with $pod.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- range . }}
    {{- $own := hasKey . "labelSelector" | ternary (dict) (dict "labelSelector" (dict "matchLabels" $selector)) }}
    - {{ merge (dict) . $own | toYaml | nindent 6 | trim }}
    {{- end }}
  {{- end }}
  securityContext:
    {{- toYaml $pod.podSecurityContext | nindent 4 }}
  {{- if or $root.Values.haproxy.enabled $pod.initContainers }}
  initContainers:
    {{- if $root.Values.haproxy.enabled }}
    {{- include "quadriga.haproxyStarter" . | nindent 4 }}
    {{- end }}
    {{- with $pod.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ .container }}
      image: {{ include "quadriga.image" $root | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      ports:
        {{- if eq .group "head" }}
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        {{- end }}
        - {name: serve, containerPort: {{ $root.Values.http.port }}}
        {{- if $root.Values.grpc.enabled }}
        - {name: grpc, containerPort: {{ $root.Values.grpc.port }}}
        {{- end }}
        {{- if $root.Values.tls.secretName }}
        - {name: https, containerPort: {{ $root.Values.tls.httpsPort }}}
        {{- if $root.Values.grpc.enabled }}
        - {name: grpc-tls, containerPort: {{ $root.Values.tls.grpcPort }}}
        {{- end }}
        {{- end }}
        {{- if $root.Values.admin.enabled }}
        - {name: admin, containerPort: {{ $root.Values.admin.port }}}
        {{- end }}
        - {name: metrics, containerPort: 8080}
      env:
        {{- include "quadriga.env" (dict "root" $root "own" $pod.env) | nindent 8 }}
      {{- with concat $root.Values.envFrom $pod.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      resources:
        {{- toYaml $pod.resources | nindent 8 }}
      securityContext:
        {{- toYaml $pod.securityContext | nindent 8 }}
      volumeMounts:
        {{- include "quadriga.sharedMounts" $root | nindent 8 }}
        {{- with $pod.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with $pod.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - name: scratch
      emptyDir: {sizeLimit: {{ $pod.scratchSize }}}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $pod.shmSize }}}
    {{- with $root.Values.apiKeys }}
    {{- if .existingSecret }}
    - name: api-keys
      secret:
        secretName: {{ quote .existingSecret }}
        defaultMode: 0440
        items:
          - {key: {{ quote .key }}, path: keys}
    {{- end }}
    {{- end }}
    {{- with $root.Values.tls.secretName }}
    - name: tls
      secret: {secretName: {{ quote . }}, defaultMode: 0440}
    {{- end }}
    {{- with $root.Values.tls.clientCaSecret }}
    - name: client-ca
      secret: {secretName: {{ quote . }}, defaultMode: 0440}
    {{- end }}
    {{- if $root.Values.modelStorage.enabled }}
    - name: models
      persistentVolumeClaim: {claimName: {{ include "quadriga.modelClaim" $root | quote }}}
    {{- end }}
    {{- with $pod.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
