// Package api is the public API as data: openapi.yaml, the single source of
// paths, fields, bounds, defaults and error codes; the Go types generated from
// it; and the checks that read it when a request or a test's response comes.
package api

import _ "embed"

//go:generate go tool oapi-codegen -config codegen.yaml openapi.yaml

// Spec is openapi.yaml.
//
//go:embed openapi.yaml
var Spec []byte
