{{/* Values that contradict each other; the schema has refused what is wrong by itself. */}}
{{- define "quadriga.validate" -}}
{{- include "quadriga.validateAccess" . -}}
{{- include "quadriga.validateModels" . -}}
{{- include "quadriga.validateUpgrades" . -}}
{{- include "quadriga.validateState" . -}}
{{- include "quadriga.validateGroups" . -}}
{{- include "quadriga.validateCapacity" . -}}
{{- end -}}

{{- define "quadriga.validateAccess" -}}
{{- $v := .Values -}}
{{- if not $v.apiKeys.existingSecret -}}
{{- range $what, $on := dict "grpc.enabled" $v.grpc.enabled "ingress.enabled" $v.ingress.enabled "gateway.enabled" $v.gateway.enabled "admin.enabled" $v.admin.enabled "tls.secretName" (ne $v.tls.secretName "") "service.type" (ne $v.service.type "ClusterIP") -}}
{{- if $on -}}
{{- fail (printf "%s needs API keys: put them into a Secret and name it in apiKeys.existingSecret" $what) -}}
{{- end -}}
{{- end -}}
{{- if not (or $v.networkPolicy.enabled $v.apiKeys.allowAnonymous) -}}
{{- fail "networkPolicy.enabled is false and there are no API keys, so every pod of the cluster could use the service: name a Secret in apiKeys.existingSecret, or set apiKeys.allowAnonymous" -}}
{{- end -}}
{{- else if $v.apiKeys.allowAnonymous -}}
{{- fail "apiKeys.allowAnonymous and apiKeys.existingSecret exclude each other: with keys, every caller shows one" -}}
{{- end -}}
{{- if $v.ingress.enabled -}}
{{- if not $v.ingress.hosts -}}
{{- fail "ingress.hosts: name at least one host" -}}
{{- end -}}
{{- if not (or $v.ingress.tlsSecret $v.ingress.allowPlaintext) -}}
{{- fail "ingress.tlsSecret is empty, so API keys would travel in the clear: name a TLS Secret, or set ingress.allowPlaintext where something in front speaks TLS" -}}
{{- end -}}
{{- end -}}
{{- if $v.gateway.enabled -}}
{{- if not $v.gateway.hostnames -}}
{{- fail "gateway.hostnames: name at least one host" -}}
{{- end -}}
{{- if and (not $v.gateway.parentRefs) (not (and $v.gateway.className $v.gateway.tlsSecret)) -}}
{{- fail "gateway: name the Gateways that exist in gateway.parentRefs, or set gateway.className and gateway.tlsSecret for one of the chart's own" -}}
{{- end -}}
{{- if and $v.grpc.enabled (not $v.gateway.grpcHostnames) -}}
{{- fail "gateway.grpcHostnames: grpc.enabled needs at least one host of its own there" -}}
{{- end -}}
{{- range $v.gateway.grpcHostnames -}}
{{- if has . $v.gateway.hostnames -}}
{{- fail (printf "gateway.grpcHostnames: %q is in gateway.hostnames too; a listener gives a host to one kind of route" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $v.inferencePool.enabled -}}
{{- if not $v.inferencePool.endpointPicker.name -}}
{{- fail "inferencePool.endpointPicker.name: name the Service of the endpoint picker, which the chart does not install" -}}
{{- end -}}
{{- if and $v.apiKeys.existingSecret (not (dig "ingress" "open_endpoint_metrics" false $v.config)) -}}
{{- fail "inferencePool: endpoint pickers send no API key; set config.ingress.open_endpoint_metrics so that they may read /metrics/endpoint" -}}
{{- end -}}
{{- end -}}
{{- if and (ne $v.service.type "ClusterIP") (not $v.tls.secretName) -}}
{{- fail (printf "service.type %s opens the pods to the outside, where API keys would travel in the clear: set tls.secretName, or let an Ingress or a Gateway do it" $v.service.type) -}}
{{- end -}}
{{- if $v.tls.secretName -}}
{{- if not $v.haproxy.enabled -}}
{{- fail "tls.secretName needs haproxy.enabled, which speaks TLS at the pods; or let an Ingress or a Gateway do it" -}}
{{- end -}}
{{- if and $v.gateway.enabled $v.grpc.enabled -}}
{{- fail "tls.secretName and a gateway with grpc.enabled exclude each other: one of the two ends TLS for gRPC" -}}
{{- end -}}
{{- else if $v.tls.clientCaSecret -}}
{{- fail "tls.clientCaSecret: client certificates need tls.secretName too" -}}
{{- end -}}
{{- if and $v.podMonitor.enabled $v.apiKeys.existingSecret (not $v.podMonitor.keySecret.name) -}}
{{- fail "podMonitor.keySecret: with API keys /metrics asks for one with `admin`; name its Secret" -}}
{{- end -}}
{{- if gt (include "quadriga.milliseconds" $v.podMonitor.scrapeTimeout | int) (include "quadriga.milliseconds" $v.podMonitor.interval | int) -}}
{{- fail (printf "podMonitor.scrapeTimeout is %s, longer than podMonitor.interval (%s): nothing would be scraped" $v.podMonitor.scrapeTimeout $v.podMonitor.interval) -}}
{{- end -}}
{{- if and $v.otel.enabled (not $v.otel.endpoint) -}}
{{- fail "otel.endpoint: needed when otel.enabled" -}}
{{- end -}}
{{- $behind := ternary (dict "8500" "Serve" "9500" "Serve") (dict) $v.haproxy.enabled -}}
{{- $ports := merge (dict "6379" "Ray" "8080" "Ray" "8265" "Ray" "10001" "Ray") $behind -}}
{{- range $what, $port := dict "http.port" $v.http.port "grpc.port" $v.grpc.port "admin.port" $v.admin.port "tls.httpsPort" $v.tls.httpsPort "tls.grpcPort" $v.tls.grpcPort -}}
{{- $number := int $port | toString -}}
{{- if hasKey $ports $number -}}
{{- fail (printf "%s: %s is taken by %s" $what $number (get $ports $number)) -}}
{{- end -}}
{{- $_ := set $ports $number $what -}}
{{- end -}}
{{- end -}}

{{/* Of a duration with one unit. */}}
{{- define "quadriga.milliseconds" -}}
{{- $unit := regexFind "[a-z]+$" . -}}
{{- mul (trimSuffix $unit . | int) (get (dict "ms" 1 "s" 1000 "m" 60000 "h" 3600000) $unit) -}}
{{- end -}}

{{- define "quadriga.validateModels" -}}
{{- $seen := dict -}}
{{- range $i, $model := .Values.models -}}
{{- if $model.download -}}
{{- if not $.Values.modelStorage.enabled -}}
{{- fail (printf "models[%d].download needs a volume: set modelStorage.enabled" $i) -}}
{{- end -}}
{{- if $model.model -}}
{{- fail (printf "models[%d]: model and download exclude each other; the model is called after its repository" $i) -}}
{{- end -}}
{{- $folder := base $model.download.repo -}}
{{- $origin := include "quadriga.origin" $model.download -}}
{{- if ne (get $seen $folder | default $origin) $origin -}}
{{- fail (printf "models[%d].download: %s and %s would share the folder %s" $i (get $seen $folder) $origin $folder) -}}
{{- end -}}
{{- $_ := set $seen $folder $origin -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "quadriga.validateUpgrades" -}}
{{- $v := .Values -}}
{{- $longest := dig "ingress" "max_deadline_s" 3600 $v.config -}}
{{- if lt (float64 $v.drainSeconds) (float64 $longest) -}}
{{- fail (printf "drainSeconds is %v, less than config.ingress.max_deadline_s (%v): upgrades would cut long streams; raise it or lower the deadline" $v.drainSeconds $longest) -}}
{{- end -}}
{{- with $v.upgradeStrategy -}}
{{- if eq .type "NewClusterWithIncrementalUpgrade" -}}
{{- if not $v.autoscaling.enabled -}}
{{- fail "upgradeStrategy.type NewClusterWithIncrementalUpgrade needs autoscaling.enabled" -}}
{{- end -}}
{{- if not .gatewayClassName -}}
{{- fail "upgradeStrategy.gatewayClassName: needed for NewClusterWithIncrementalUpgrade" -}}
{{- end -}}
{{- if gt (int .stepSizePercent) (int .maxSurgePercent) -}}
{{- fail (printf "upgradeStrategy.stepSizePercent is %d, more than maxSurgePercent (%d)" (int .stepSizePercent) (int .maxSurgePercent)) -}}
{{- end -}}
{{- if or $v.ingress.enabled (and $v.gateway.enabled (not $v.inferencePool.enabled)) -}}
{{- fail "ingress and gateway lead to a Service that KubeRay does not make with NewClusterWithIncrementalUpgrade: clients use KubeRay's own Gateway" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "quadriga.validateState" -}}
{{- $v := .Values -}}
{{- with $v.gcsFaultTolerance -}}
{{- if .enabled -}}
{{- if and (eq .backend "redis") (not .redisAddress) -}}
{{- fail "gcsFaultTolerance.redisAddress: needed with the backend redis" -}}
{{- end -}}
{{- if and (or .externalStorageNamespace .storage.claimName) (ne $v.upgradeStrategy.type "None") -}}
{{- fail "gcsFaultTolerance.externalStorageNamespace and storage.claimName are one place for both clusters of an upgrade: leave them empty, or set upgradeStrategy.type to None" -}}
{{- end -}}
{{- range concat $v.env $v.head.env -}}
{{- if eq .name "RAY_REDIS_ADDRESS" -}}
{{- fail "RAY_REDIS_ADDRESS must not be set beside gcsFaultTolerance: KubeRay sets it" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $v.networkPolicy.enabled $v.networkPolicy.egress.enabled (not $v.networkPolicy.egress.extra) -}}
{{- $redis := and $v.gcsFaultTolerance.enabled (ne $v.gcsFaultTolerance.redisAddress "") -}}
{{- range $what, $on := dict "gcsFaultTolerance.redisAddress" $redis "the Kubernetes API (autoscaling.enabled)" $v.autoscaling.enabled "otel.endpoint" $v.otel.enabled -}}
{{- if $on -}}
{{- fail (printf "networkPolicy.egress.extra: let the pods reach %s" $what) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "quadriga.validateGroups" -}}
{{- include "quadriga.validatePod" (dict "where" "head" "pod" .Values.head) -}}
{{- include "quadriga.validateResources" (dict "where" "head" "pod" .Values.head) -}}
{{- include "quadriga.validatePod" (dict "where" "workerDefaults" "pod" .Values.workerDefaults) -}}
{{- range $name, $own := .Values.workerGroups -}}
{{- include "quadriga.validatePod" (dict "where" (printf "workerGroups.%s" $name) "pod" ($own | default dict)) -}}
{{- end -}}
{{- range $name, $group := include "quadriga.groups" . | fromJson -}}
{{- if gt (int $group.minReplicas) (int $group.maxReplicas) -}}
{{- fail (printf "workerGroups.%s: minReplicas is %d, more than maxReplicas (%d)" $name (int $group.minReplicas) (int $group.maxReplicas)) -}}
{{- end -}}
{{- if or (lt (int $group.replicas) (int $group.minReplicas)) (gt (int $group.replicas) (int $group.maxReplicas)) -}}
{{- fail (printf "workerGroups.%s: replicas is %d, outside minReplicas..maxReplicas (%d..%d)" $name (int $group.replicas) (int $group.minReplicas) (int $group.maxReplicas)) -}}
{{- end -}}
{{- include "quadriga.validateResources" (dict "where" (printf "workerGroups.%s" $name) "pod" $group) -}}
{{- if eq $name "head" -}}
{{- fail "workerGroups.head: the name is the head's; take another" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "quadriga.validatePod" -}}
{{- $taken := list "containers" "initContainers" "volumes" "securityContext" "serviceAccountName" "automountServiceAccountToken" "terminationGracePeriodSeconds" "imagePullSecrets" "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" "topologySpreadConstraints" "restartPolicy" -}}
{{- range $field, $_ := get $.pod "podSpec" | default dict -}}
{{- if has $field $taken -}}
{{- fail (printf "%s.podSpec: %s is set by a value of its own, or by the chart" $.where $field) -}}
{{- end -}}
{{- end -}}
{{- range $field := list "labels" "podLabels" -}}
{{- range $label, $_ := get $.pod $field | default dict -}}
{{- if regexMatch "^(quadriga|ray\\.io)/" $label -}}
{{- fail (printf "%s.%s: %s is a label that the chart or Ray sets; take another prefix" $.where $field $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Kubernetes takes no request above its limit. Ray gives its object store 30 % of the memory, and no
more than /dev/shm or 10 GB, the larger of both; it puts one that does not fit into /dev/shm on the disk. */}}
{{- define "quadriga.validateResources" -}}
{{- range $name, $asked := dig "requests" (dict) .pod.resources -}}
{{- $most := dig "limits" $name $asked $.pod.resources -}}
{{- if gt (include "quadriga.bytes" $asked | float64) (include "quadriga.bytes" $most | float64) -}}
{{- fail (printf "%s.resources: requests.%s is %v, more than its limit (%v): Kubernetes would refuse the pods" $.where $name $asked $most) -}}
{{- end -}}
{{- end -}}
{{- $memory := dig "limits" "memory" 0 .pod.resources -}}
{{- $store := min (mulf 0.3 (include "quadriga.bytes" $memory | float64) | int64) 10000000000 -}}
{{- if and (lt (include "quadriga.bytes" .pod.shmSize | float64 | int64) $store) (not (hasKey .pod.rayStartParams "object-store-memory")) -}}
{{- fail (printf "%s.shmSize is %v, less than 30 %% of the limit of memory (%v) and than 10 GB, so Ray's object store would be on the disk: raise it, or set rayStartParams.object-store-memory" .where .pod.shmSize $memory) -}}
{{- end -}}
{{- end -}}

{{/* Bytes of a quantity. */}}
{{- define "quadriga.bytes" -}}
{{- $unit := toString . | regexFind "[A-Za-z]+$" -}}
{{- $sizes := dict "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976 -}}
{{- mulf (toString . | trimSuffix $unit | float64) (get $sizes $unit | default 1) -}}
{{- end -}}

{{/* Whole CPUs of a group's pod, as KubeRay tells Ray: rounded up. */}}
{{- define "quadriga.cpus" -}}
{{- $reserved := dig "limits" "cpu" (dig "requests" "cpu" 0 .resources) .resources -}}
{{- $cpu := get .rayStartParams "num-cpus" | default $reserved | toString -}}
{{- if hasSuffix "m" $cpu -}}
{{- divf (trimSuffix "m" $cpu | float64) 1000 | ceil | int -}}
{{- else -}}
{{- $cpu | float64 | ceil | int -}}
{{- end -}}
{{- end -}}

{{/* 1 where HELIOS has a scout of each role beside the first model's replicas, else 0. */}}
{{- define "quadriga.scouts" -}}
{{- $helios := .Values.config.helios | default dict -}}
{{- $isOn := hasKey $helios "enabled" | ternary $helios.enabled (not (empty $helios.catalogue)) -}}
{{- and $isOn (dig "scout" true $helios) | ternary 1 0 -}}
{{- end -}}

{{/* Every replica must find a place at the largest size of the groups it may be in, beside those
that may be nowhere else. Without autoscaling nobody adds pods. */}}
{{- define "quadriga.validateCapacity" -}}
{{- $engine := (include "quadriga.args" . | fromYaml).engine -}}
{{- if eq $engine.device "auto" -}}
{{- fail "config.engine.device: \"auto\" depends on which nodes joined first; say cpu or cuda" -}}
{{- end -}}
{{- range $field := list "resources_cpus" "resources_gpus" -}}
{{- if kindIs "string" (get $engine $field) -}}
{{- fail (printf "config.engine.%s: %q depends on which nodes joined first; give a number" $field (get $engine $field)) -}}
{{- end -}}
{{- end -}}
{{- $ranks := $engine.tensor_parallel | default 1 | int -}}
{{- $size := .Values.autoscaling.enabled | ternary "maxReplicas" "replicas" -}}
{{- $wanted := dict -}}
{{- $places := dict -}}
{{- range $i, $pool := include "quadriga.pools" . | fromJsonArray -}}
{{- $scouts := eq $i 0 | ternary (include "quadriga.scouts" $ | int) 0 -}}
{{- range $role := gt (int $pool.mixed_replicas) 0 | ternary (list "mixed") (list "prefill" "decode") -}}
{{- $key := get $pool (printf "%s_labels" $role) | default dict | toJson -}}
{{- $count := get $pool (printf "%s_replicas" $role) | int | add $scouts | mul $ranks -}}
{{- $_ := set $wanted $key (get $wanted $key | default 0 | add $count) -}}
{{- $groups := dict -}}
{{- range $name, $group := include "quadriga.groups" $ | fromJson -}}
{{- $matches := true -}}
{{- range $label, $value := fromJson $key -}}
{{- if ne (get $group.labels $label | toString) $value -}}{{- $matches = false -}}{{- end -}}
{{- end -}}
{{- if $matches -}}
{{- $fit := include "quadriga.replicasPerPod" (dict "group" $group "engine" $engine "gpu" $.Values.gpuResourceName) | int -}}
{{- $_ := set $groups $name (mul (int (get $group $size)) (int $group.numOfHosts) $fit) -}}
{{- end -}}
{{- end -}}
{{- if not $groups -}}
{{- fail (printf "no worker group has the labels %s that replicas of a model ask for; add them to a group's labels" $key) -}}
{{- end -}}
{{- $_ := set $places $key $groups -}}
{{- end -}}
{{- end -}}
{{- range $key, $groups := $places -}}
{{- $count := 0 -}}
{{- range $other, $others := $places -}}
{{- $isInside := true -}}
{{- range $name, $_ := $others -}}{{- $isInside = and $isInside (hasKey $groups $name) -}}{{- end -}}
{{- if $isInside -}}{{- $count = add $count (get $wanted $other) -}}{{- end -}}
{{- end -}}
{{- $slots := 0 -}}
{{- range $groups -}}{{- $slots = add $slots . -}}{{- end -}}
{{- if gt (int $count) (int $slots) -}}
{{- $what := eq $ranks 1 | ternary "replicas" "ranks of replicas" -}}
{{- fail (printf "%d %s ask for nodes with the labels %s, but the worker groups %s hold %d of them at most (config.engine.resources_cpus: %v, resources_gpus: %v): raise %s or the limits in resources" (int $count) $what $key (keys $groups | sortAlpha | join ", ") (int $slots) $engine.resources_cpus $engine.resources_gpus $size) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Replicas that fit into one pod of a group, by CPUs and GPUs. */}}
{{- define "quadriga.replicasPerPod" -}}
{{- $fit := 1024 -}}
{{- if gt (float64 .engine.resources_cpus) 0.0 -}}
{{- $fit = min $fit (divf (include "quadriga.cpus" .group | float64) (float64 .engine.resources_cpus) | floor | int) -}}
{{- end -}}
{{- if gt (float64 .engine.resources_gpus) 0.0 -}}
{{- $gpus := get .group.rayStartParams "num-gpus" | default (dig "limits" .gpu 0 .group.resources) | float64 -}}
{{- $fit = min $fit (divf $gpus (float64 .engine.resources_gpus) | floor | int) -}}
{{- end -}}
{{- $fit -}}
{{- end -}}
