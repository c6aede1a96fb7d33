{{/* Start of the names of all objects of a release; at most 40 characters, so that suffixes fit */}}
{{- define "sie.fullname" -}}
{{- default .Release.Name .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* Selector of the pods of a component: (list root component) */}}
{{- define "sie.selector" -}}
app.kubernetes.io/name: {{ (index . 0).Chart.Name }}
app.kubernetes.io/instance: {{ toYaml (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Labels of an object: (list root component) */}}
{{- define "sie.labels" -}}
{{ include "sie.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ (index . 0).Chart.Name }}-{{ (index . 0).Chart.Version }}
{{- end }}

{{/* Start of the metadata of an object; more labels may follow: (list root component name) */}}
{{- define "sie.metadata" -}}
name: {{ toYaml (index . 2) }}
labels:
  {{- include "sie.labels" . | nindent 2 }}
{{- end }}

{{/* Reference of an image of SIE: (list root name) */}}
{{- define "sie.image" -}}
{{- $root := index . 0 -}}
{{- $image := $root.Values.image -}}
{{- with $image.registry }}{{ trimSuffix "/" . }}/{{ end }}{{ index . 1 }}:{{ default $root.Chart.AppVersion $image.tag }}
{{- end }}

{{/* Text of a value, without an exponent: Helm reads each number as a float */}}
{{- define "sie.value" -}}
{{- if and (kindIs "float64" .) (eq . (float64 (int64 .))) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end }}

{{/*
Live number of pods of a Deployment under an autoscaler, if its manifest must have `replicas`: (list root name autoscaling HPA).
If the last manifest has `replicas` and the next one does not, helm's merge removes the field, and the server sets 1. So a Deployment whose autoscaler is
new keeps the field, with the number of pods that it has. An annotation tells later upgrades to keep it too. The autoscaler set this number last, so the
merge changes nothing. A Deployment that always had its autoscaler has no `replicas`, because `helm rollback` would set the number of an earlier time.
*/}}
{{- define "sie.kept" -}}
{{- $namespace := (index . 0).Release.Namespace -}}
{{- if (index . 2).enabled -}}
{{- $live := lookup "apps/v1" "Deployment" $namespace (index . 1) -}}
{{- $autoscaler := lookup "autoscaling/v2" "HorizontalPodAutoscaler" $namespace (index . 3) -}}
{{- if and $live (or (not $autoscaler) (hasKey (default dict $live.metadata.annotations) "sie/replicas")) -}}
{{- $live.spec.replicas | int64 -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Annotation of a Deployment that keeps `replicas`: the number of "sie.kept", or nothing */}}
{{- define "sie.keptAnnotation" -}}
{{- if . }}
  annotations: {sie/replicas: kept}
{{- end }}
{{- end }}

{{/* Number of bytes of a size in Ki, Mi, Gi or Ti */}}
{{- define "sie.bytes" -}}
{{- $unit := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mul (regexFind "^[0-9]+" .) (get $unit (regexFind "[KMGT]i$" .)) -}}
{{- end }}

{{/* Set the values of the second map in the first map: (list target source). Unlike mergeOverwrite, this also sets false, 0 and "" */}}
{{- define "sie.overlay" -}}
{{- $target := index . 0 -}}
{{- range $key, $value := index . 1 -}}
{{- if and (kindIs "map" $value) (kindIs "map" (get $target $key)) -}}
{{- include "sie.overlay" (list (get $target $key) $value) -}}
{{- else -}}
{{- $_ := set $target $key $value -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Group of workers with all its values, as YAML: (list root name) */}}
{{- define "sie.group" -}}
{{- $root := index . 0 -}}
{{- $own := index $root.Values.workers.groups (index . 1) -}}
{{- $profile := default dict (get $root.Values.machineProfiles $own.machineProfile) -}}
{{- $group := deepCopy $root.Values.workers.common -}}
{{- include "sie.overlay" (list $group (omit $profile "batcher" "tolerations")) -}}
{{- include "sie.overlay" (list $group $own) -}}
{{- $_ := set $group "tolerations" (concat (default list $group.tolerations) (default list $profile.tolerations)) -}}
{{- $_ := set $group "settings" (deepCopy (default dict $root.Values.settings)) -}}
{{- range list $root.Values.workers.common $profile $own -}}
{{- include "sie.overlay" (list $group.settings (default dict .settings)) -}}
{{- end -}}
{{- $batcher := dict -}}
{{- range list $root.Values.workers.common.workerSidecar.batcher $profile.batcher (default dict $own.workerSidecar).batcher -}}
{{- range $key, $value := default dict . -}}
{{- if not (kindIs "invalid" $value) -}}
{{- $_ := set $batcher $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $_ := set $group.workerSidecar "batcher" $batcher -}}
{{- toYaml $group -}}
{{- end }}

{{/* Name of the pool in subjects: in lower case; default is an alias of _default */}}
{{- define "sie.pool" -}}
{{- $pool := lower .Values.pool -}}
{{- if eq $pool "default" }}_default{{ else }}{{ $pool }}{{ end -}}
{{- end }}

{{/* Machine profiles of all groups without duplicates, as a JSON list: the default first, then by the names of groups */}}
{{- define "sie.machineProfiles" -}}
{{- $default := list -}}
{{- $profiles := list -}}
{{- range $name := keys .Values.workers.groups | sortAlpha -}}
{{- $profiles = append $profiles (get (index $.Values.workers.groups $name) "machineProfile") -}}
{{- end -}}
{{- with .Values.gateway.defaultMachineProfile -}}
{{- if has . $profiles }}{{ $default = append $default . }}{{ end -}}
{{- end -}}
{{- uniq (concat $default $profiles) | toJson -}}
{{- end }}

{{/* Argument with the address that a process listens on */}}
{{- define "sie.host" -}}
{{- printf "--host=%s" .Values.network.host | toYaml -}}
{{- end }}

{{/* Address and port that the broker listens on: (list root port) */}}
{{- define "sie.listen" -}}
{{- $host := (index . 0).Values.network.host -}}
{{- contains ":" $host | ternary (printf "[%s]" $host) $host }}:{{ index . 1 -}}
{{- end }}

{{/* Address families of a Service, in its spec */}}
{{- define "sie.families" -}}
{{- with .Values.network.ipFamilyPolicy }}
  ipFamilyPolicy: {{ . }}
{{- end }}
{{- with .Values.network.ipFamilies }}
  ipFamilies: {{ toJson . }}
{{- end }}
{{- end }}

{{/* Seconds that a pod may take to end: more than the lame duck and the longest request */}}
{{- define "sie.grace" -}}
{{- add (int64 (ceil .Values.gateway.requestTimeoutSeconds)) (int64 .Values.gateway.preStopSeconds) 30 -}}
{{- end }}

{{/* Variables of the settings that a component reads. Fails for a setting that no process reads: (list root component settings) */}}
{{- define "sie.settings" -}}
{{- $component := index . 1 -}}
{{- $readers := (index . 0).Files.Get "files/settings.json" | fromJson -}}
{{- $settings := default dict (index . 2) -}}
{{- range $name := keys $settings | sortAlpha -}}
{{- if not (hasKey $readers $name) -}}
{{- $suggestion := include "sie.near" (list $name (keys $readers)) -}}
{{- fail (printf "settings.%s: no process reads it here%s; `sie settings` lists all settings, and a setting with a key in values.yaml is set by that key" $name $suggestion) -}}
{{- end -}}
{{- if has $component (get $readers $name) }}
- name: {{ $name }}
  value: {{ include "sie.value" (get $settings $name) | quote }}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Variables of every process: (list root component settings) */}}
{{- define "sie.env" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
- name: SIE_LOG_JSON
  value: {{ $root.Values.logs.json | quote }}
{{- if $root.Values.tracing.enabled }}
- name: SIE_TRACING_ENABLED
  value: "true"
- name: OTEL_SERVICE_NAME
  value: {{ printf "%s-%s" $root.Values.tracing.serviceName $component | toYaml }}
- name: OTEL_TRACES_EXPORTER
  value: {{ $root.Values.tracing.exporter | quote }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ $root.Values.tracing.endpoint | quote }}
- name: OTEL_TRACES_SAMPLER
  value: {{ $root.Values.tracing.sampler | quote }}
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ include "sie.value" $root.Values.tracing.samplerArg | quote }}
{{- end }}
{{- include "sie.settings" . }}
{{- end }}

{{/* Variables for the connection of a component to the broker: (list root user) */}}
{{- define "sie.brokerEnv" -}}
{{- $root := index . 0 -}}
{{- $user := index . 1 -}}
{{- $servers := printf "nats://%s-nats:4222" (include "sie.fullname" $root) -}}
{{- if not $root.Values.nats.enabled -}}
{{- $servers = required "nats.url: name the servers of your broker, or set nats.enabled=true for the broker of the chart" $root.Values.nats.url -}}
{{- end -}}
- name: SIE_NATS_URL
  value: {{ regexReplaceAll "^(nats|tls)://" $servers (printf "${1}://%s@" $user) | quote }}
- name: SIE_NATS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ include "sie.secret" $root }}, key: nats-{{ $user }}}
{{- end }}

{{/* Variables of processes that read the catalogue from the config service */}}
{{- define "sie.readerEnv" -}}
- name: SIE_CONFIG_SERVICE_URL
  value: http://{{ include "sie.fullname" . }}-config:8081
{{ include "sie.readTokenEnv" . }}
{{- end }}

{{- define "sie.readTokenEnv" -}}
- name: SIE_CONFIG_READ_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ include "sie.secret" . }}, key: config-read-token}
{{- end }}

{{- define "sie.adminTokenEnv" -}}
- name: SIE_ADMIN_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ include "sie.secret" . }}, key: admin-token, optional: true}
{{- end }}

{{/* Variables of processes that create streams or buckets */}}
{{- define "sie.streamEnv" -}}
- name: SIE_STREAM_STORAGE
  value: {{ .Values.stream.storage }}
- name: SIE_STREAM_REPLICAS
  value: {{ include "sie.value" .Values.stream.replicas | quote }}
{{- end }}

{{- define "sie.payloadEnv" -}}
{{- if .Values.payloadStore.existingClaim }}
- name: SIE_PAYLOAD_STORE_URL
  value: /var/lib/sie/payloads
{{- else if .Values.payloadStore.url }}
- name: SIE_PAYLOAD_STORE_URL
  value: {{ .Values.payloadStore.url | quote }}
{{- end }}
{{- end }}

{{- define "sie.payloadMount" -}}
{{- if .Values.payloadStore.existingClaim }}
- {name: payloads, mountPath: /var/lib/sie/payloads}
{{- end }}
{{- end }}

{{- define "sie.payloadVolume" -}}
{{- with .Values.payloadStore.existingClaim }}
- name: payloads
  persistentVolumeClaim: {claimName: {{ toYaml . }}}
{{- end }}
{{- end }}

{{/* Name of the secret, as YAML. The secret and auth.mode have no defaults */}}
{{- define "sie.secret" -}}
{{- $_ := include "sie.authMode" . -}}
{{- required "auth.secretName: name a secret with at least config-read-token and the passwords of the broker's users (see values.yaml)" .Values.auth.secretName | toYaml -}}
{{- end }}

{{- define "sie.authMode" -}}
{{- $mode := required "auth.mode: choose who may call: none (everybody who reaches the gateway), static (tokens of the secret) or token (keys of `sie keys`)" .Values.auth.mode -}}
{{- if not (has $mode (list "none" "static" "token")) -}}
{{- fail (printf "auth.mode: got %q, expected none, static or token" $mode) -}}
{{- end -}}
{{- $mode -}}
{{- end }}

{{/* Restricted pod security. All processes have the same user, because a socket only accepts processes of its own user */}}
{{- define "sie.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "sie.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Selector of a Deployment, and its pod template without the spec: (list root component values) */}}
{{- define "sie.pods" -}}
selector:
  matchLabels:
    {{- include "sie.selector" . | nindent 4 }}
template:
  metadata:
    labels:
      {{- include "sie.labels" . | nindent 6 }}
    {{- with (index . 2).podAnnotations }}
    annotations:
      {{- toYaml . | nindent 6 }}
    {{- end }}
{{- end }}

{{/* Start of the spec of every pod: (list root component values account); `component` is that of the label */}}
{{- define "sie.pod" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $values := index . 2 -}}
serviceAccountName: {{ include "sie.fullname" $root }}-{{ index . 3 }}
automountServiceAccountToken: false
# a link to a service named sie-gateway would set variables such as SIE_GATEWAY_METRICS_PORT
enableServiceLinks: false
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ toYaml . }}
  {{- end }}
{{- end }}
securityContext:
  {{- include "sie.podSecurity" $root | nindent 2 }}
{{- with $values.priorityClassName }}
priorityClassName: {{ toYaml . }}
{{- end }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ toYaml . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.spread }}
topologySpreadConstraints:
  - topologyKey: kubernetes.io/hostname
    maxSkew: 1
    whenUnsatisfiable: {{ . }}
    {{- if eq . "DoNotSchedule" }}
    # else a node with a taint that this pod does not tolerate, such as a GPU node, is a domain without pods, and allows one pod on each other node
    nodeTaintsPolicy: Honor
    {{- if ne $component "nats" }}
    # spread the pods of one revision; brokers have no such label, and old and new ones are one cluster
    matchLabelKeys: [pod-template-hash]
    {{- end }}
    {{- end }}
    labelSelector:
      matchLabels:
        {{- include "sie.selector" (list $root $component) | nindent 8 }}
{{- end }}
{{- end }}

{{/* Disruption budget: (list root component maxUnavailable) */}}
{{- define "sie.budget" -}}
{{- $root := index . 0 -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "sie.metadata" (list $root (index . 1) (printf "%s-%s" (include "sie.fullname" $root) (index . 1))) | nindent 2 }}
spec:
  maxUnavailable: {{ kindIs "string" (index . 2) | ternary (index . 2) (index . 2 | int64) }}
  # pods that are not ready do not delay a drain
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "sie.selector" (list $root (index . 1)) | nindent 6 }}
{{- end }}

{{/* Service account without permissions: (list root component annotations) */}}
{{- define "sie.account" -}}
{{- $root := index . 0 -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "sie.metadata" (list $root (index . 1) (printf "%s-%s" (include "sie.fullname" $root) (index . 1))) | nindent 2 }}
  {{- with index . 2 }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end }}

{{/* HTTP probes of a process: (list port seconds-to-start) */}}
{{- define "sie.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: {{ index . 0 }}}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: {{ div (index . 1) 2 }}
livenessProbe:
  httpGet: {path: /healthz, port: {{ index . 0 }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: {{ index . 0 }}}
  periodSeconds: 3
  timeoutSeconds: 3
  failureThreshold: 3
{{- end }}

{{/* Text ", did you mean X?", if one of the names differs little from a name: (list name names). Case, _ and - do not count */}}
{{- define "sie.near" -}}
{{- $name := index . 0 | lower | replace "_" "" | replace "-" "" -}}
{{- $best := dict -}}
{{- range $other := index . 1 | sortAlpha -}}
{{- $candidate := $other | lower | replace "_" "" | replace "-" "" -}}
{{- $short := min (len $name) (len $candidate) | int -}}
{{- $long := max (len $name) (len $candidate) | int -}}
{{- $prefix := 0 -}}
{{- range $at := until $short -}}
{{- if and (eq $prefix $at) (eq (substr $at (add1 $at | int) $name) (substr $at (add1 $at | int) $candidate)) -}}{{- $prefix = add1 $at | int -}}{{- end -}}
{{- end -}}
{{- $suffix := 0 -}}
{{- range $at := until (sub $short $prefix | int) -}}
{{- $nameIndex := sub (sub (len $name) $at) 1 | int -}}
{{- $candidateIndex := sub (sub (len $candidate) $at) 1 | int -}}
{{- if and (eq $suffix $at) (eq (substr $nameIndex (add1 $nameIndex | int) $name) (substr $candidateIndex (add1 $candidateIndex | int) $candidate)) -}}{{- $suffix = add1 $at | int -}}{{- end -}}
{{- end -}}
{{- $distance := sub (sub $long $prefix) $suffix | int -}}
{{- /* two neighbouring characters may be swapped; in a long name, a longer part may be missing */ -}}
{{- if or (le $distance 1) (and (le $distance 2) (ge $long 5)) (and (le $distance 3) (ge $long 9)) -}}
{{- if or (not (hasKey $best "name")) (lt $distance $best.distance) -}}{{- $_ := set $best "name" $other -}}{{- $_ := set $best "distance" $distance -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- with $best.name }}, did you mean {{ . }}?{{ end -}}
{{- end }}

{{/* Error lines for keys of values that no template reads: (list values path keys) */}}
{{- define "sie.unknown" -}}
{{- $values := index . 0 -}}
{{- $path := index . 1 -}}
{{- $known := index . 2 -}}
{{- if and (kindIs "map" $values) (kindIs "map" $known) -}}
{{- range $key := keys $values | sortAlpha -}}
{{- $at := ternary $key (printf "%s.%s" $path $key) (eq $path "") -}}
{{- if hasKey $known "*" -}}
{{- include "sie.unknown" (list (index $values $key) $at (index $known "*")) -}}
{{- else if hasKey $known $key -}}
{{- include "sie.unknown" (list (index $values $key) $at (index $known $key)) -}}
{{- else if hasPrefix "SIE_" $key -}}
{{- printf "- %s: no process reads it here%s `sie settings` lists all settings, and a setting with a key in values.yaml is set by that key\n" $at (include "sie.near" (list $key (keys $known)) | default ";") -}}
{{- else -}}
{{- printf "- %s: there is no such key%s\n" $at (include "sie.near" (list $key (keys $known)) | default (printf "; there are: %s" (keys $known | sortAlpha | join ", "))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
