package api

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/getkin/kin-openapi/openapi3"
)

// API is openapi.yaml made ready for checks. Safe for concurrent use.
type API struct {
	ops  []*Operation
	byID map[string]*Operation
}

// Operation is one method on one path. Safe for concurrent use.
type Operation struct {
	ID     string // operationId, the key of handlers and metrics
	Method string // upper case
	Path   string // with {name} for path parameters
	Public bool   // needs no API key

	body         *openapi3.Schema // nil: takes no JSON body
	bodyRequired bool
	defaults     []byte // JSON object of the body's defaults
	params       []param
	responses    *openapi3.Responses
}

// param is a query or header parameter.
type param struct {
	name, in string
	required bool
	schema   *openapi3.Schema
}

// Load reads openapi.yaml; it is read once in a process.
var Load = sync.OnceValues(load)

func load() (*API, error) {
	doc, err := openapi3.NewLoader().LoadFromData(Spec)
	if err != nil {
		return nil, fmt.Errorf("openapi.yaml: %w", err)
	}
	a := &API{byID: make(map[string]*Operation)}
	for path, item := range doc.Paths.Map() {
		for method, o := range item.Operations() {
			op, err := newOperation(method, path, item, o)
			if err != nil {
				return nil, fmt.Errorf("openapi.yaml: %s %s: %w", method, path, err)
			}
			if a.byID[op.ID] != nil || op.ID == "" {
				return nil, fmt.Errorf("openapi.yaml: %s %s: operationId %q is not unique", method, path, op.ID)
			}
			a.ops = append(a.ops, op)
			a.byID[op.ID] = op
		}
	}
	slices.SortFunc(a.ops, func(x, y *Operation) int { return strings.Compare(x.ID, y.ID) })
	return a, nil
}

// Operation finds an operation by its operationId; nil when there is none.
func (a *API) Operation(id string) *Operation { return a.byID[id] }

// Operations lists all operations by id.
func (a *API) Operations() []*Operation { return a.ops }

func newOperation(method, path string, item *openapi3.PathItem, o *openapi3.Operation) (*Operation, error) {
	op := &Operation{ID: o.OperationID, Method: method, Path: path, responses: o.Responses}
	op.Public = o.Security != nil && len(*o.Security) == 0
	for _, ref := range append(slices.Clone(item.Parameters), o.Parameters...) {
		if p := ref.Value; p.In == openapi3.ParameterInQuery || p.In == openapi3.ParameterInHeader {
			op.params = append(op.params, param{p.Name, p.In, p.Required, p.Schema.Value})
		}
	}
	if o.RequestBody == nil {
		return op, nil
	}
	media := o.RequestBody.Value.Content["application/json"]
	if media == nil {
		return op, nil // raw bytes: the handler streams them
	}
	op.body, op.bodyRequired = media.Schema.Value, o.RequestBody.Value.Required
	var err error
	op.defaults, err = defaultsOf(op.body)
	return op, err
}

// defaultsOf gathers the defaults of an object's direct properties.
func defaultsOf(s *openapi3.Schema) ([]byte, error) {
	all := make(map[string]any)
	for name, p := range s.Properties {
		if p.Value.Default != nil {
			all[name] = p.Value.Default
		}
	}
	return json.Marshal(all)
}

// TakesJSON says whether the operation reads a JSON body.
func (op *Operation) TakesJSON() bool { return op.body != nil }
