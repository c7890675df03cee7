{{/* The two DaemonSets of a volume, of a dict with root, name and volume. The operator makes its own from the same. */}}
{{- define "kvfuse.holder" -}}
{{- $root := .root }}{{- $values := .root.Values -}}
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: {{ include "kvfuse.fullname" $root }}-{{ .name }}-holder
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "kvfuse.labels" $root | nindent 4 }}
    app.kubernetes.io/component: holder
    kvfuse.io/volume: {{ .name }}
spec:
  selector:
    matchLabels:
      {{- include "kvfuse.selector" $root | nindent 6 }}
      app.kubernetes.io/component: holder
      kvfuse.io/volume: {{ .name }}
  # Never by itself: a new holder is a risk without a gain. A pod that is deleted is made anew; the mount stays.
  updateStrategy: {type: OnDelete}
  template:
    metadata:
      labels:
        {{- include "kvfuse.selector" $root | nindent 8 }}
        app.kubernetes.io/component: holder
        kvfuse.io/volume: {{ .name }}
        {{- with $values.podLabels }}{{ toYaml . | nindent 8 }}{{ end }}
      {{- with $values.podAnnotations }}
      annotations: {{ toJson . }}
      {{- end }}
    spec:
      {{- include "kvfuse.nodePod" $root | nindent 6 }}
      nodeSelector: {{ toJson (.volume.nodeSelector | default $values.nodeSelector) }}
      terminationGracePeriodSeconds: {{ add $values.holder.graceSeconds 10 }}
      containers:
        - name: hold
          image: {{ include "kvfuse.image" $root }}
          imagePullPolicy: {{ $values.image.pullPolicy }}
          # A pod whose mount was ended for good mounts again once the mark is gone. A mount that is there is not looked at:
          # that would wait for its daemon.
          command:
            - sh
            - -ec
            - |
              point=/var/lib/kvfuse/volumes/$VOLUME/mnt pid=
              is_ended() { [ "$(cat "/run/kvfuse/hold/$VOLUME.ended" 2>/dev/null)" = "$POD_UID" ]; }
              trap 'if [ -n "$pid" ]; then kill -TERM "$pid" || true; else exit 0; fi' TERM
              while :; do
                while is_ended; do sleep 1; done
                grep -q " $point " /proc/self/mountinfo || mkdir -p "$point"
                kvfuse hold "/etc/kvfuse/$VOLUME/mount.conf" "$point" --socket "/run/kvfuse/hold/$VOLUME.sock" "$@" &
                pid=$! status=0
                # A signal ends wait(1) before the process ends.
                while kill -0 "$pid" 2>/dev/null; do status=0; wait "$pid" || status=$?; done
                pid=
                is_ended || exit "$status"
              done
            - hold
            - --wait={{ $values.holder.waitSeconds }}
            - --grace={{ $values.holder.graceSeconds }}
          env:
            - {name: VOLUME, value: {{ quote .name }}}
            - name: POD_UID
              valueFrom: {fieldRef: {fieldPath: metadata.uid}}
          securityContext:
            # /dev/fuse and mount(2); Kubernetes allows mountPropagation: Bidirectional for privileged containers alone.
            privileged: true
          # It is ready while somebody serves the mount: the call waits for an answer of the daemon. 65735546: a FUSE mount.
          readinessProbe:
            exec:
              command:
                - sh
                - -c
                - test "$(timeout -s KILL 4 stat -f -c %t /var/lib/kvfuse/volumes/{{ .name }}/mnt)" = 65735546
            timeoutSeconds: 5
            periodSeconds: 10
            failureThreshold: 1
          resources: {{ toJson $values.holder.resources }}
          volumeMounts:
            - {name: state, mountPath: /var/lib/kvfuse, mountPropagation: Bidirectional}
            - {name: run, mountPath: /run/kvfuse}
            - {name: config, mountPath: /etc/kvfuse/{{ .name }}, readOnly: true}
      volumes:
        - name: state
          hostPath: {path: {{ $values.stateDir }}, type: DirectoryOrCreate}
        - name: run
          hostPath: {path: {{ $values.runDir }}, type: DirectoryOrCreate}
        - name: config
          configMap: {name: {{ include "kvfuse.fullname" $root }}-{{ .name }}}
{{- end }}

{{- define "kvfuse.daemon" -}}
{{- $root := .root }}{{- $values := .root.Values -}}
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: {{ include "kvfuse.fullname" $root }}-{{ .name }}-daemon
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "kvfuse.labels" $root | nindent 4 }}
    app.kubernetes.io/component: daemon
    kvfuse.io/volume: {{ .name }}
spec:
  selector:
    matchLabels:
      {{- include "kvfuse.selector" $root | nindent 6 }}
      app.kubernetes.io/component: daemon
      kvfuse.io/volume: {{ .name }}
  updateStrategy:
    type: RollingUpdate
    {{- if and $values.daemon.surge (semverCompare ">=1.22-0" $root.Capabilities.KubeVersion.Version) }}
    # The next pod stands by before the former one is told to end.
    rollingUpdate: {maxSurge: 1, maxUnavailable: 0}
    {{- else }}
    rollingUpdate: {maxUnavailable: {{ $values.daemon.maxUnavailable }}}
    {{- end }}
  template:
    metadata:
      labels:
        {{- include "kvfuse.selector" $root | nindent 8 }}
        app.kubernetes.io/component: daemon
        kvfuse.io/volume: {{ .name }}
        {{- with $values.podLabels }}{{ toYaml . | nindent 8 }}{{ end }}
      annotations:
        kvfuse.io/config: {{ include "kvfuse.mountConf" . | sha256sum | trunc 16 }}
        {{- if .volume.metricsPort }}
        kvfuse.io/metrics-port: {{ int .volume.metricsPort | quote }}
        {{- end }}
        {{- with $values.podAnnotations }}{{ toYaml . | nindent 8 }}{{ end }}
    spec:
      {{- include "kvfuse.nodePod" $root | nindent 6 }}
      nodeSelector: {{ toJson (.volume.nodeSelector | default $values.nodeSelector) }}
      terminationGracePeriodSeconds: {{ $values.daemon.terminationGracePeriodSeconds }}
      containers:
        {{- $here := . }}
        {{- range (ternary (list "serve-a" "serve-b") (list "serve-a") $values.daemon.standby) }}
        - name: {{ . }}
          {{- include "kvfuse.serve" $here | nindent 10 }}
        {{- end }}
      volumes:
        - name: state
          hostPath: {path: {{ $values.stateDir }}, type: DirectoryOrCreate}
        - name: run
          hostPath: {path: {{ $values.runDir }}, type: DirectoryOrCreate}
        - name: config
          configMap: {name: {{ include "kvfuse.fullname" $root }}-{{ .name }}}
        {{- range .volume.secrets }}
        - name: secret-{{ . }}
          secret: {secretName: {{ . }}, defaultMode: 0400}
        {{- end }}
        {{- range .volume.configMaps }}
        - name: files-{{ . }}
          configMap: {name: {{ . }}}
        {{- end }}
        {{- range $number, $path := .volume.hostPaths }}
        - name: host-{{ $number }}
          hostPath: {path: {{ $path }}, type: Directory}
        {{- end }}
        {{- if .volume.devices }}
        - name: dev
          hostPath: {path: /dev, type: Directory}
        {{- end }}
{{- end }}

{{- define "kvfuse.serve" -}}
{{- $root := .root }}{{- $values := .root.Values -}}
image: {{ include "kvfuse.image" $root }}
imagePullPolicy: {{ $values.image.pullPolicy }}
# The first process of a container ignores SIGTERM until it has a handler: Python alone would miss one while it starts, and
# the pod would be killed only at the end of its grace.
command:
  - sh
  - -c
  - |
    pid=
    trap 'if [ -n "$pid" ]; then kill -TERM "$pid"; else exit 0; fi' TERM
    kvfuse serve "$@" &
    pid=$! status=0
    # A signal ends wait(1) before the process ends.
    while kill -0 "$pid" 2>/dev/null; do wait "$pid"; status=$?; done
    exit "$status"
  - serve
  - /etc/kvfuse/{{ .name }}/mount.conf
  - /var/lib/kvfuse/volumes/{{ .name }}/mnt
  - --socket=/run/kvfuse/hold/{{ .name }}.sock
{{- with $values.daemon.env }}
env: {{ toJson . }}
{{- end }}
securityContext:
  {{- if .volume.devices }}
  privileged: true
  {{- else }}
  allowPrivilegeEscalation: false
  capabilities:
    drop: [ALL]
    # docs/kubernetes.md says what each is for.
    add: {{ toJson $values.daemon.capabilities }}
  {{- end }}
resources: {{ toJson $values.daemon.resources }}
volumeMounts:
  - {name: state, mountPath: /var/lib/kvfuse, mountPropagation: HostToContainer}
  - {name: run, mountPath: /run/kvfuse}
  - {name: config, mountPath: /etc/kvfuse/{{ .name }}, readOnly: true}
  {{- range .volume.secrets }}
  - {name: secret-{{ . }}, mountPath: /etc/kvfuse/secrets/{{ . }}, readOnly: true}
  {{- end }}
  {{- range .volume.configMaps }}
  - {name: files-{{ . }}, mountPath: /etc/kvfuse/files/{{ . }}, readOnly: true}
  {{- end }}
  {{- range $number, $path := .volume.hostPaths }}
  - {name: host-{{ $number }}, mountPath: {{ $path }}, mountPropagation: HostToContainer}
  {{- end }}
  {{- if .volume.devices }}
  - {name: dev, mountPath: /dev}
  {{- end }}
{{- end }}
