{{/* The service's own configuration, from `models` and `config`. */}}

{{- define "quadriga.device" -}}
{{- dig "engine" "device" "cpu" .Values.config -}}
{{- end -}}

{{/* Folder of a downloaded model: the last part of its repository, under its revision if it names
one: an upgrade to another must not change files that replicas have open. */}}
{{- define "quadriga.downloadPath" -}}
{{- $revision := .download.revision | default "main" -}}
{{- $under := eq $revision "main" | ternary "" (printf "/%s" (replace "/" "-" $revision)) -}}
{{- printf "%s%s/%s" (trimSuffix "/" .root.Values.modelStorage.mountPath) $under (base .download.repo) -}}
{{- end -}}

{{/* What the folder of a downloaded model says once it is complete. */}}
{{- define "quadriga.origin" -}}
{{- printf "%s@%s" .repo (.revision | default "main") -}}
{{- end -}}

{{- define "quadriga.downloads" -}}
{{- $downloads := list -}}
{{- range .Values.models -}}
{{- with .download -}}
{{- $downloads = append $downloads (dict "repo" .repo "revision" (.revision | default "main") "path" (include "quadriga.downloadPath" (dict "root" $ "download" .))) -}}
{{- end -}}
{{- end -}}
{{- $downloads | uniq | toJson -}}
{{- end -}}

{{/* Name of the download job. A job's pod cannot change: another pod, or other limits, make another job. */}}
{{- define "quadriga.downloadJob" -}}
{{- $facts := list (include "quadriga.downloadPod" .) .Values.modelDownload | toJson -}}
{{- printf "%s-models-%s" (include "quadriga.fullname" .) (sha256sum $facts | trunc 8) -}}
{{- end -}}

{{/* The merged settings of all worker groups, by name. */}}
{{- define "quadriga.groups" -}}
{{- $groups := dict -}}
{{- range $name, $own := .Values.workerGroups -}}
{{- if $own -}}
{{- $group := mergeOverwrite (deepCopy $.Values.workerDefaults) (deepCopy $own) -}}
{{- $role := ternary (dict) (dict "quadriga/role" $group.role) (eq $group.role "any") -}}
{{- $_ := set $group "labels" (merge (dict) $role (dict "quadriga/group" $name) $group.labels) -}}
{{- $_ := set $groups $name $group -}}
{{- end -}}
{{- end -}}
{{- $groups | toJson -}}
{{- end -}}

{{/* Roles that have groups of their own: where there are none, replicas go anywhere. How many
there are would otherwise depend on which GPUs joined first. */}}
{{- define "quadriga.pools" -}}
{{- $auto := dict "prefill" 1 "decode" 2 -}}
{{- $roles := dict -}}
{{- range $group := include "quadriga.groups" . | fromJson -}}
{{- $_ := set $roles $group.role true -}}
{{- end -}}
{{- $pools := list -}}
{{- range .Values.models -}}
{{- $pool := omit (deepCopy .) "download" -}}
{{- with .download -}}
{{- $_ := set $pool "model" (include "quadriga.downloadPath" (dict "root" $ "download" .)) -}}
{{- $_ := set $pool "fetched_from" (include "quadriga.origin" .) -}}
{{- end -}}
{{- $_ := set $pool "mixed_replicas" ($pool.mixed_replicas | default 0) -}}
{{- range $role := ternary (list "mixed") (list "prefill" "decode") (gt (int $pool.mixed_replicas) 0) -}}
{{- $field := printf "%s_labels" $role -}}
{{- if and (not (hasKey $pool $field)) (hasKey $roles $role) -}}
{{- $_ := set $pool $field (dict "quadriga/role" $role) -}}
{{- end -}}
{{- $count := printf "%s_replicas" $role -}}
{{- if has (get $pool $count) (list "" "auto") -}}
{{- $_ := set $pool $count (get $auto $role) -}}
{{- end -}}
{{- end -}}
{{- $pools = append $pools $pool -}}
{{- end -}}
{{- $pools | toJson -}}
{{- end -}}

{{/* Everything `serve_app.app:build` takes. What is reserved is said, as nodes may join later. */}}
{{- define "quadriga.args" -}}
{{- $args := deepCopy .Values.config -}}
{{- $isCuda := eq (include "quadriga.device" .) "cuda" -}}
{{- $engine := dict "device" "cpu" "resources_cpus" 1 "resources_gpus" (ternary 1 0 $isCuda) -}}
{{- $_ := set $args "engine" (mergeOverwrite $engine ($args.engine | default dict)) -}}
{{- $_ := set $args "pools" (include "quadriga.pools" . | fromJsonArray) -}}
{{- if .Values.apiKeys.existingSecret -}}
{{- $file := dict "api_keys_file" (printf "%s/keys" (include "quadriga.keysPath" .)) -}}
{{- $_ := set $args "auth" (mergeOverwrite ($args.auth | default dict) $file) -}}
{{- end -}}
{{- if .Values.admin.enabled -}}
{{- $_ := set $args "admin" (dict "host" "0.0.0.0" "port" .Values.admin.port) -}}
{{- end -}}
{{- $args | toYaml -}}
{{- end -}}

{{- define "quadriga.keysPath" -}}/etc/quadriga/auth{{- end -}}

{{/* What Serve is told: https://docs.ray.io, "Serve config files". */}}
{{- define "quadriga.serveConfig" -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: {{ .Values.http.port }}
{{- if .Values.grpc.enabled }}
grpc_options:
  port: {{ .Values.grpc.port }}
  grpc_servicer_functions:
    - serve_app.grpc.messages.add_quadriga_to_server
    - grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server
  enable_reflection: true
{{- end }}
logging_config:
  encoding: JSON
applications:
  - name: {{ .Values.config.name | default "quadriga" | quote }}
    route_prefix: /
    import_path: serve_app.app:build
    args:
      {{- include "quadriga.args" . | nindent 6 }}
    deployments:
      - name: Ingress
        graceful_shutdown_timeout_s: {{ .Values.drainSeconds }}
        max_surge_percent: 100
{{- end -}}
