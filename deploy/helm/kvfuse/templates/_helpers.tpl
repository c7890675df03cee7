{{- define "kvfuse.fullname" -}}
{{- if contains "kvfuse" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-kvfuse" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "kvfuse.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "kvfuse.selector" -}}
app.kubernetes.io/name: kvfuse
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvfuse.labels" -}}
{{ include "kvfuse.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Pods on nodes: what all of them have. */}}
{{- define "kvfuse.nodePod" -}}
hostNetwork: {{ .Values.hostNetwork }}
hostPID: {{ .Values.hostPID }}
{{- if .Values.hostNetwork }}
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
priorityClassName: {{ .Values.priorityClassName }}
automountServiceAccountToken: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
tolerations: {{ toJson .Values.tolerations }}
{{- end }}

{{/* mount.conf of volume .name: .volume as in values. A JSON value is one of TOML, too. */}}
{{- define "kvfuse.mountConf" -}}
{{- if .volume.mountConf }}
{{- if .volume.config }}{{ fail (printf "volumes.%s: say config or mountConf, not both" .name) }}{{ end }}
{{- .volume.mountConf }}
{{- else }}
{{- $config := deepCopy (.volume.config | default dict) }}
{{- $section := get $config "volume" | default dict }}
{{- $records := get $config "records" | default dict }}
{{- $default := ternary (dict "name" .name) (dict "path" (printf "/var/lib/kvfuse/volumes/%s/volume" .name)) (eq (get $records "engine" | default "lmdb") "etcd") }}
{{- $_ := set $config "volume" (merge $section $default) }}
{{- $_ := set $config "mount" (merge (get $config "mount" | default dict) (dict "allow_other" true)) }}
{{- if .volume.metricsPort }}
{{- $_ := set $config "metrics" (merge (get $config "metrics" | default dict) (dict "listen" (printf "0.0.0.0:%d" (int .volume.metricsPort)))) }}
{{- end }}
{{- range $section, $keys := $config }}
[{{ $section }}]
{{- range $key, $value := $keys }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{ end }}
{{- end }}
{{- end }}
