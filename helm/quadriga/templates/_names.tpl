{{/* Names and labels. */}}

{{- define "quadriga.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 47 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 47 characters: KubeRay adds a suffix, and the result is a Service's name. */}}
{{- define "quadriga.fullname" -}}
{{- $name := include "quadriga.name" . -}}
{{- $full := .Values.fullnameOverride -}}
{{- if not $full -}}
{{- $full = ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 47 | trimSuffix "-" -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,45}[a-z0-9])?$" $full) -}}
{{- fail (printf "the name %q must begin with a letter, hold only a-z, 0-9 and '-', and have at most 47 characters; set fullnameOverride" $full) -}}
{{- end -}}
{{- $full -}}
{{- end -}}

{{- define "quadriga.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/name: {{ include "quadriga.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: quadriga
{{- end -}}

{{/* Metadata of one of the chart's objects: (dict "root" $ "name" … "annotations" … "labels" …). */}}
{{- define "quadriga.metadata" -}}
name: {{ .name | quote }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- $labels := include "quadriga.labels" .root | fromYaml }}
  {{- merge (dict) (.labels | default dict) .root.Values.commonLabels $labels | toYaml | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* What never changes on a pod, and is selected on: the chart's version must not be in it. */}}
{{- define "quadriga.selector" -}}
quadriga/release: {{ include "quadriga.fullname" . | quote }}
{{- end -}}

{{- define "quadriga.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "quadriga.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "quadriga.serveService" -}}
{{- include "quadriga.fullname" . }}-serve-svc
{{- end -}}

{{/* With API keys the test needs one, and the chart knows only their hashes; where the upgrade is
incremental, KubeRay makes no Service of that name. */}}
{{- define "quadriga.hasTest" -}}
{{- $isIncremental := eq .Values.upgradeStrategy.type "NewClusterWithIncrementalUpgrade" -}}
{{- if and (or .Values.test.keySecret.name (not .Values.apiKeys.existingSecret)) (not $isIncremental) }}true{{ end -}}
{{- end -}}

{{- define "quadriga.modelClaim" -}}
{{- default (printf "%s-models" (include "quadriga.fullname" .)) .Values.modelStorage.existingClaim -}}
{{- end -}}

{{- define "quadriga.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- $variant := ternary "cuda" "cpu" (eq (include "quadriga.device" .) "cuda") -}}
{{- printf "%s:%s" $image.repository (default (printf "%s-%s" .Chart.AppVersion $variant) $image.tag) -}}
{{- end -}}
{{- end -}}
